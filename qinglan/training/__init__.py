"""Training the student: SFT, reinforcement learning, the reward service and its alarms."""
