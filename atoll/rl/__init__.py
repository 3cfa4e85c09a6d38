"""Reinforcement learning: policies, the objective, bodies that move, and the samplers that move them."""
