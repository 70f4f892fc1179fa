"""The configuration of a service: the models that validate its YAML file."""
