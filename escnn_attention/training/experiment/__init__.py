"""Experiments: a network, its data and its training, from a configuration file, in one folder."""

from escnn_attention.training.experiment.checkpoints import BEST, CONFIGURATION, LAST, TEST
from escnn_attention.training.experiment.command import run_experiment
from escnn_attention.training.experiment.network import load_network

__all__ = ["BEST", "CONFIGURATION", "LAST", "TEST", "load_network", "run_experiment"]
