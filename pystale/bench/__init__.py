"""``pystale bench``: what pystale saves on this machine, beside what one would write without it."""
