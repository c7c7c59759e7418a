"""A job on a simulated clock: the real ledger, with events in place of workers, rewards and a trainer."""
