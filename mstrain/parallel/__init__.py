"""How the products of a model are laid out on a mesh."""
