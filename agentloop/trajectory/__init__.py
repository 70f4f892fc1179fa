"""Token-exact records: the turn graph, its paths, and how a history finds its place."""
