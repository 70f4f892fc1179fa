"""Components of the public HTTP edge: guard, authentication, responses, event streams and the OpenAPI document."""
