"""The papers' tables and figures, run again."""

from typing import Any

from . import fmrl, per_fedavg

EXPERIMENTS: dict[str, type[Any]] = {
    "per-fedavg/table1": per_fedavg.Table1,
    "fmrl/table1": fmrl.Table1,
    "fmrl/fig1": fmrl.Fig1,
    "fmrl/fig2": fmrl.Fig2,
    "fmrl/fig3": fmrl.Fig3,
    "fmrl/fig4": fmrl.Fig4,
    "fmrl/fig5": fmrl.Fig5,
    "fmrl/fig6": fmrl.Fig6,
    "fmrl/orders": fmrl.Orders,
    "fmrl/privacy": fmrl.PrivacyCurve,
}
