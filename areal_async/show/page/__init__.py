"""What a run did, seen in a browser: a page that is served, and one file to send to someone."""
