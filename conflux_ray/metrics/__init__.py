"""What the server tells of itself: every metric defined once, counted in plain Python, exported in two ways.

`definitions` names them, `store` holds the values, `ingress` and `instance` count, `ray_export` hands the values to
Ray's metrics agent once a second and `exposition` writes them for a scrape of one process. No metric costs an
iteration or a token more than a few additions.
"""
