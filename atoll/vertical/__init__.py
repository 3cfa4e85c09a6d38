"""Vertical federation: parties that see the same world differently learn one policy (FRL)."""

from .account import Account, account, vectors_sent
from .gridworld import GridWorld
from .hosted import HostedLead, HostedPassive, host_lead, host_passive
from .networks import DenseNetwork, GridNetwork, Head
from .parties import Lead, Learning, Passive
from .protocol import Noise, Peer, Phase, Recorded
from .text2action import TextScore, TextWorld
from .textnetwork import TextNetwork
from .training import METHODS, Setup, Training
from .trials import Experiment, Result, Trials
from .world import Outcome, Score, Stage, World, WorldSettings

__all__ = [
    "METHODS",
    "Account",
    "DenseNetwork",
    "Experiment",
    "GridNetwork",
    "GridWorld",
    "Head",
    "HostedLead",
    "HostedPassive",
    "Lead",
    "Learning",
    "Noise",
    "Outcome",
    "Passive",
    "Peer",
    "Phase",
    "Recorded",
    "Result",
    "Score",
    "Setup",
    "Stage",
    "TextNetwork",
    "TextScore",
    "TextWorld",
    "Training",
    "Trials",
    "World",
    "WorldSettings",
    "account",
    "host_lead",
    "host_passive",
    "vectors_sent",
]
