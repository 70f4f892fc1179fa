"""A fake of the coordinator for one replica."""


class Directory:
    """Lets a replica start after a delay, lists it until it leaves, and records the reasons for which it left."""

    def __init__(self):
        self.num_waits = 2
        self.known = {}
        self.left = []

    async def starting(self, replica_id, software):
        self.num_waits -= 1
        return self.num_waits < 0

    async def register(self, registration):
        self.known[registration.replica_id] = registration

    async def heartbeat(self, replica_id, report):
        return replica_id in self.known

    async def deregister(self, replica_id, reason=""):
        if self.known.pop(replica_id, None):
            self.left.append(reason)
