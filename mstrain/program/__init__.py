"""What is compiled: state, step, optimizer, memory."""
