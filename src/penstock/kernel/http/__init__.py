"""HTTP for every application: middleware, problems, health, authentication, the client."""
