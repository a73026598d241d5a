"""What `evaluate.py` does: policies side by side, and the checks of engine and measurement."""
