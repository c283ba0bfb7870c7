"""What Qinglan runs on without keys and GPUs: stand-ins that speak the real protocols, and a sample to work on."""
