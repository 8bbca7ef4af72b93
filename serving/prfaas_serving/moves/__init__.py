"""Node moves: which worker changes its role, and the steps drain, switch, verify, relabel that carry it out.

`orders` chooses and refuses, `mover` runs the steps, `base` says what an actuator is, `state` is what survives a
restart; each kind of actuator has a file of its own.
"""
