"""The viewer in the browser: its pages, and what they read of the records."""
