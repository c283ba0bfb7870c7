"""What scores the samples of reinforcement learning."""
