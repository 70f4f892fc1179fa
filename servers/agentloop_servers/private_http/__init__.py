"""HTTP between the processes of one run: servers, clients, fencing, and TCP keep-alive."""
