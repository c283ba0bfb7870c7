"""Training engines behind two seams: pure builders from config to `Command`, and the one launcher."""
