"""The maths: pure functions on packed tensors. Global statistics come in as values."""
