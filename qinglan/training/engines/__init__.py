"""Training engines behind two interfaces: pure builders from config to `Command`, and the one
launcher."""
