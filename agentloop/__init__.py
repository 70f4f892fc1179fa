"""agentloop: asynchronous rollouts of language-model agents for reinforcement learning.

This package is pure asyncio and imports neither Ray nor an engine: data types, the agent loop, the worker
that runs many of them, the balancer and queue as plain objects, and the client. What needs Ray, an HTTP
server or an engine lives in `agentloop_servers`; tools live in `agentloop_tools`.
"""

__version__ = "0.1.0"
