"""Where does a step spend its time, or its memory?"""
