"""A run in the browser: a page that is served, and one file to send to someone."""
