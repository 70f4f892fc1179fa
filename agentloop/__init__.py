"""agentloop: asynchronous rollouts of language-model agents for reinforcement learning.

This package uses only asyncio and imports neither Ray nor an engine. It has the data types, the agent loops, the
worker that runs many trajectories, the balancer and the queue as plain objects, and the client. Code that needs
Ray, an HTTP server or an engine is in `agentloop_servers`; tools are in `agentloop_tools`.
"""

__version__ = "0.1.0"
