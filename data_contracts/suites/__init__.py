"""What every table must hold, declared once as data: `gate` renders the rules to Great Expectations and to a cheap check."""
