"""The kernels where other code looks for them: PyTorch's SDPA, Hugging Face's attention interface."""
