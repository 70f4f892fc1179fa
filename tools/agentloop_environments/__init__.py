"""Published task sets as environments: BFCL, reasoning-gym and TextArena.

The packages with the tasks are imported when an environment is loaded: `agentloop` runs without them.
"""
