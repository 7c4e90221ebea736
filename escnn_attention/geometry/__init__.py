"""Where features lie: grids, clouds of points, the sphere, and what a query sees of a key."""
