"""The papers' tables and figures, run again."""

from typing import Any

from . import feddrl, fmrl, frl, per_fedavg, server_time

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
    "feddrl/table3": feddrl.Table3,
    "feddrl/table4": feddrl.Table4,
    "feddrl/fig5": feddrl.Fig5,
    "feddrl/fig6": feddrl.Fig6,
    "feddrl/fig7": feddrl.Fig7,
    "feddrl/fig8": feddrl.Fig8,
    "feddrl/fig9": server_time.Fig9,
    "feddrl/fig10": feddrl.Fig10,
    "frl/table1": frl.Table1,
    "frl/fig3": frl.Fig3,
    "frl/table2": frl.Table2,
    "frl/fig5": frl.Fig5,
}
