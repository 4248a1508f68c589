"""What router, controller and replica say to each other, and the connections between them."""
