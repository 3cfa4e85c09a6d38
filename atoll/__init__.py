"""Personalised federated learning and federated reinforcement learning."""
