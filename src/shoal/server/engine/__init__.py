"""The engine in the control plane: it holds as many machines as the jobs can use, and watches them."""
