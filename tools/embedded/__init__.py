"""Parts of `tools/train_embedded.py`: the teacher, the PyTorch model, its training and its evaluation."""
