"""An open-loop load generator for servers that speak the OpenAI API.

command.py   the command line: reads options, runs the loads, prints and writes
words.py     words that are one token each
work.py      how long prompts and answers are: ranges, mixes, traces, conversation files
arrivals.py  when requests are due
prompts.py   token ids or words of a wanted count, and the bodies that carry them
target.py    what the server under test is and which fields it takes
client.py    HTTP connections and streams of events, with the time of every event
load.py      sends what is due, whatever is still unanswered
figures.py   percentiles, goodput, intervals
report.py    the results as data, as a table, as curves
"""
