"""``khot explore``: a local page where one drags scores, k and tau and sees what every method makes of them."""
