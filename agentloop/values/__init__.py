"""Values that every package uses: tokens and their sampling, how calls end, checks, and the wire format."""
