"""The public HTTP edge's tools: guard, authentication, answers, event streams and the OpenAPI document."""
