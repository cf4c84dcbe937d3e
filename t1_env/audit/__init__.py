"""Attacks on the reward, and what they gain: nothing, or T1 has a hole.

An attack is a small file under ``attacks``: commands of an agent that does no honest work, played through the ordinary environment on any
task. `audit_tasks` plays attacks against tasks and says, for each pair, how many verifiers it was paid for and whether it was noticed.
The same attack can be played against a verifier that does what most harnesses do (tests copied into the agent's own sandbox and run there
with its programs): what gains there and not here is what isolation is for. ``docs/audit.md`` explains the classes.
"""

from t1_env.audit.attack import Attack, choose_attacks, load_attacks
from t1_env.audit.matrix import AuditReport, Plan, audit_tasks
from t1_env.audit.play import Played, play
from t1_env.audit.site import Site, survey

__all__ = [
    "Attack",
    "AuditReport",
    "Plan",
    "Played",
    "Site",
    "audit_tasks",
    "choose_attacks",
    "load_attacks",
    "play",
    "survey",
]
