"""What is compiled: state, step, optimizer, inference, memory."""
