"""A trainer that is lost and comes back while the run goes on."""
