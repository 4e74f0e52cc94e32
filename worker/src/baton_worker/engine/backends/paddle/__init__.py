"""The model's arithmetic in Paddle: decoder, attention, norm, and the engine made of them."""
