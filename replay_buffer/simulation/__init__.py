"""A job on a simulated clock: the real ledger, between workers, rewards and a trainer that are events."""
