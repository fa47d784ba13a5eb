"""What people do and ask: one module per verb. Each change is in the store before it is carried out."""
