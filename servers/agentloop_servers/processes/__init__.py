"""The wiring of each kind of process, and where Ray Serve places them."""
