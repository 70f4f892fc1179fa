"""The coordinator as one replica needs it."""


class Directory:
    """Lets a replica start after a while, knows it until it leaves, and keeps the reasons for which it left."""

    def __init__(self):
        self.waits = [0.01, 0.01]
        self.known = {}
        self.left = []

    async def starting(self, replica_id, slot):
        return self.waits.pop() if self.waits else 0.0

    async def register(self, registration):
        self.known[registration.replica_id] = registration

    async def heartbeat(self, replica_id, report):
        return replica_id in self.known

    async def deregister(self, replica_id, reason=""):
        if self.known.pop(replica_id, None):
            self.left.append(reason)
