"""Speed, as ratios in one run (``make bench``). A module a subject; each prints figures and verdict."""
