"""The viewer in the browser: its pages, and what they read of the records. A service has it, or `agentloop view`."""
