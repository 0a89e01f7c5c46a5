"""Training one model on machines that are far apart, with rare communication.

Names are loaded when they are first used, so that importing this package does not import torch.
"""
