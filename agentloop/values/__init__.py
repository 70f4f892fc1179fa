"""Value types that all packages share: tokens, sampling options, end states, validation and the wire format."""
