"""The written answers: committed rows and calculators as tables and quoted numbers inside documents."""
