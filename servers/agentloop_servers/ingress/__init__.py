"""The public HTTP edge: rollouts, administration, and the application that serves them."""
