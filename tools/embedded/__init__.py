"""What `tools/train_embedded.py` is made of: a teacher, a model in PyTorch, its training and its evaluation."""
